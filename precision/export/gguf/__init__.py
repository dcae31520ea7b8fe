"""What llama.cpp is given beside a recipe.

names (of tensors, by gguf's tables) · importance (the matrix, a file for llama-quantize) · model (a GGUF file of the
model itself, quantised as simulated).
"""
