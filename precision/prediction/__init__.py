"""The error of any assignment of schemes to sites: predicted from four cotangents, measured, and calibrated.

In: an `Observed` and its model and batches. Out: the quadratic form of the error, measured errors, a prediction with
its interval. `auditing` calls; `advice` takes the passes.

perturbations (what a scheme changes) · chain, recording (the model as blocks) · rows, turns, weights, passed,
sensitivity, backward, products (the backward pass of all cotangents) · profiles, quadratic_form · predictor (the
prediction, a value) · simulation, abreast, measuring (the model run with assignments) · positions (errors over those of
long sequences) · trials (what is measured to calibrate) · calibration (the interval) · overruns (what static scales
clip of other sequences).
"""
