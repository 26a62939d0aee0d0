"""Other libraries' models on linattn, without a change in them. Nothing here is imported until it is asked for.

======================================  =====================================================================
``linattn.integrations.transformers``   the models of ``transformers`` with a recurrent layer
``linattn.integrations.fla``            functions of ``fla``, and its layers
``linattn.integrations.mamba_ssm``      functions of ``mamba_ssm``
``linattn.integrations.causal_conv1d``  functions of ``causal_conv1d``
``linattn.integrations.mlx_lm``         functions of ``mlx_lm``
``linattn.integrations.jax``            functions of JAX ports of Qwen3-Next
======================================  =====================================================================

A module that is named after a package holds functions of that package, under their own names and exact signatures, and
``FUNCTIONS``, which says for each dotted name of the package which of ours means the same. It is used in one of two ways:
import a function from here instead of from there, or call ``enable()``, after which the package's own models use ours.
``disable()`` gives everything back; ``with enable():`` does so at the end of a block, unless somebody else has enabled it. It
is the process that is served, all its threads. For a program that cannot be edited there is ``linattn run-with``.

What takes the place of what, and how, is :mod:`linattn.integrations.seams`.
"""
