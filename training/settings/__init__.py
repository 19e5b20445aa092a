"""Settings of recipes: records with ranges, which import neither torch nor the decoder.

What stands here is shared with modules that transcribe on a device, where there is no pyarrow.
"""

from typing import Annotated

from infra.settings import Range

AcousticScale = Annotated[float, Range(1e-6, 1000)]

MAX_ORDER = 10
"""The longest n-grams of a language model, in words."""
