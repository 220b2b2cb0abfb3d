"""Dynamic networks that `jdynoff` is made for: the workloads of its tests, demos and benchmarks.

They are ordinary JAX programs and never import `jdynoff`; a train step is managed from outside.
"""
