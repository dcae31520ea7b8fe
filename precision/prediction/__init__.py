"""The error of any assignment of schemes to sites: predicted from four cotangents, measured, and calibrated.

perturbations (a scheme's changes) · chain (the model as blocks) · row_sampling, sensitivity, backward (the backward
pass of all cotangents) · quadratic_form · simulation, measuring (the model run with assignments; errors over positions)
· calibration (the interval) · predictor (the prediction, and the assignments that are measured to calibrate it).
"""
