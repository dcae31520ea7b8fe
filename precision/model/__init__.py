"""The inside of a model: its sites, the products that predict an assignment's error, and an assignment simulated.

tap (the open forward pass) · sites (what there is, seen once) · menu (what may stand where) · sensitivity (one backward
pass) · simulation.
"""
