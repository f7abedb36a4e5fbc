"""MoEvement inside Megatron: the parts of this project that know the trainer.

``megatron`` is a namespace package; this folder lives beside the unmodified ``megatron.core`` and
``megatron.training`` of the installed wheel. Importing it changes nothing: :mod:`megatron.moevement.activate` does.
"""
