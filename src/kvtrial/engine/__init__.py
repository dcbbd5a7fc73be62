"""The decode engine: a GGUF file becomes a model whose decode step swaps its KV store at one point.

In reading order:

==================  ================================================================================
`gguf`, `config`    the file, its metadata as a `ModelConfig`; typed errors before memory is taken
`kinds`             tensor kinds: their blocks
`support`           what of a file does not run, all of it at once
`architecture`      model families as data: what one's layers do that another's don't
`tokenizer`         the file's BPE or SentencePiece, through the library ``tokenizers``
`weights`           matrices packed into panels of eight rows; ``_weights`` multiplies by them
`transformer`       `Model` and `Decoder`: what everything else calls
`scheduler`         a step as named regions; attention is the one that a store provides; ``_regions``
                    has the others
`prefill`           many positions at once; ``_panels`` multiplies by them on integers
`synthetic`         files with seeded random weights
`errors`            what is wrong with a file, a name or a text
==================  ================================================================================

Another model family is a line of `architecture.ARCHITECTURES`, as far as it differs in what is there.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtrial.engine.transformer import Model


def load(path: Path | str) -> Model:
    """The model of a GGUF file.

    Raises
    ------
    ModelError
        Whatever is wrong in the file; see `kvtrial.engine.errors`.
    """
    from kvtrial.engine.gguf import read_gguf
    from kvtrial.engine.synthetic import is_synthetic
    from kvtrial.engine.transformer import Model

    path = Path(path)
    with _memory_for(path):
        file = read_gguf(path)
        return Model.from_gguf(file, name=path.stem, synthetic=is_synthetic(file))


@contextlib.contextmanager
def _memory_for(path: Path) -> Iterator[None]:
    """`ModelTooLarge` where the system refuses memory: NumPy, Python and mmap each say so in their own way."""
    from kvtrial.engine.errors import ModelTooLarge
    from kvtrial.host import machine

    try:
        yield
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        raise ModelTooLarge(
            f"{path}: has {path.stat().st_size} bytes, its weights are copied into memory, and the "
            f"system refused some of that ({error}); {machine.available_memory_bytes()} bytes are "
            "available: free memory, raise the process's limit, or take a smaller model"
        ) from error
