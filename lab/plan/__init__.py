"""Which stage? `formulas` computes what each engine holds, sends and moves; `python -m lab.plan` advises."""
