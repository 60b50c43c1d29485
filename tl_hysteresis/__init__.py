"""Does the path by which training reached a data mixture leave a trace in a transformer?

The public names stand in ``__init__.pyi``. Each is imported when it is first used, since
TransformerLens takes seconds to load.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

__version__ = "0.1.0"
