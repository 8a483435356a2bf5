"""What jax_kda's speed is measured with, and how it is shown.

`python -m bench.prefill`, `bench.peers` and `bench.compare` measure; `bench.readme`, `bench.figures` and
`bench.notebook` show what is in bench/results.
"""
