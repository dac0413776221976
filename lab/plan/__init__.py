"""Which stage? `formulas` knows what each engine holds, sends and moves; `python -m lab.plan` advises."""
