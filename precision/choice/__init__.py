"""The assignment to use: one option for every fusion group, under budgets of error, bytes and time.

roofline (bytes and times) · problem (groups, options, budgets; dominated options) · program (the integer program) ·
choosing (solutions refined under the true error, the Pareto front, the closest to infeasible budgets) · recommendation
(candidates measured, the best one explained in words).
"""
