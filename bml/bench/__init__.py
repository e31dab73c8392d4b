"""Measuring: the constants of this machine, and allreduce side by side with Gloo and OpenMPI.

`fit` and `rows` are pure arithmetic. A *contender* is a set of rank processes that do allreduce in one way;
ranks wait for orders of the `host`, so that contenders take turns in one call and nobody disturbs the other.
"""
