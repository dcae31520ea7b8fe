"""What one forward pass over the calibration data shows of a model.

In: a model in float32, calibration batches, a metric, names of schemes. Out: an `Observed`: the sites, the schemes that
may stand at each, what passed there, the quantisation parameters that follow, the reference outputs. `auditing` calls.

running (the model made ready, batches) · tracer (a visitor sees every site) · handlers, attention (which
functions of torch are sites) · streaming (weights read from files) · sites (the observer) · qparams · observing.
"""
