"""The engine of MoEvement: decisions and bytes, without any knowledge of Megatron.

Nothing below this package imports ``megatron``; a unit test keeps it so.
"""

__version__ = "0.1.0"
