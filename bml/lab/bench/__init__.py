"""Measures the constants of this machine, and times allreduce beside Gloo and OpenMPI.

`fit` and `rows` are pure arithmetic. A *contender* is a set of rank processes that do allreduce in one way.
The ranks wait for orders of the `host`, so that contenders take turns and do not disturb each other.
"""
