"""The error of any assignment of schemes to sites: predicted from one backward pass, measured, and calibrated.

In: an `Observed` and its model and batches. Out: the quadratic form of the error, measured errors, a prediction with
its interval. `auditing` calls; `advice` takes the passes.

perturbations (what a scheme changes) · chain, recording (the model as blocks) · rows, turns, weights, sensitivity,
backward, products (one backward pass) · quadratic_form ·
predictor (the prediction, a value) · simulation (the model run with an assignment) · trials (what is measured to
calibrate) · calibration (the interval) · overruns (what static scales clip of other sequences).
"""
