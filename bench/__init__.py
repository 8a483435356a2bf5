"""What jax_kda's speed is measured with: `python -m bench.prefill`, `bench.peers`, `bench.compare`."""
