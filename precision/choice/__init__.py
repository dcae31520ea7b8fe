"""The assignment to take: one option for every fusion group, under budgets of error, bytes and time.

In: sites with their costs, predicted errors, budgets. Out: an `Assignment`, or the front of bytes and error.
`auditing` calls.

roofline (bytes and times) · problem (groups, options, budgets; what is dominated) · program (the integer program) ·
refinement (exchanges under the true error) · choosing · recommendation, assignment · explanation (in words).
"""
