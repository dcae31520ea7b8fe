"""One forward pass over the calibration data: the sites of a model, their statistics, the quantisation parameters.

running (a float32 model and its batches) · tracer (a visitor sees every site) · operations (the functions of torch that
are sites) · groups (grouped products) · streaming (weights read from files) · sites (the observer) · qparams ·
observing (the result, an `Observed`).
"""
