"""Statistics of a kernel's errors over many calls: a test of bias, growth with length, significant bits.

`bias` is the test of an examination, with its stated rate of false alarms; `growth` and `significance` describe, and
enter no verdict. The derivations stand in docs/statistics.md.
"""
