"""Parts of MoEvement that know Megatron's trainer.

``megatron`` is a namespace package; this folder is beside the unmodified ``megatron.core`` and ``megatron.training`` of
the installed wheel. Importing this package changes nothing in Megatron; :func:`megatron.moevement.activate.activate`
does.
"""
