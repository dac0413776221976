"""Which stage? `formulas` knows what each engine holds, sends and moves; `python -m common.plan` advises."""
