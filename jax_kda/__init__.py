"""Kimi Delta Attention for JAX."""
