"""Errors of models: files, tokenizers, names. Each names the value, what is allowed, what to do."""

from __future__ import annotations


class ModelError(Exception):
    """Base of everything that reading, finding or fetching a model raises."""


class GgufTruncated(ModelError):
    """The file ends before the key or tensor that the message names."""


class GgufInvalid(ModelError):
    """Not a GGUF file that this reader takes, or one that contradicts itself."""


class UnsupportedTensorType(ModelError):
    """A tensor in a format that the engine has no kernel for."""


class UnsupportedArchitecture(ModelError):
    """The file's ``general.architecture`` is none of those that the engine runs."""


class ModelTooLarge(ModelError):
    """The model's weights do not fit into the memory that the system gives this process."""


class MissingTensor(ModelError):
    """The architecture needs a tensor that the file lacks."""


class NonFiniteWeight(ModelError):
    """A weight, or the scale of a block of weights, is NaN or infinite."""


class TokenizerUnsupported(ModelError):
    """The file's tokenizer is none of those that are known to be right."""


class UnknownModel(ModelError, LookupError):
    """No model of that name in config/models.yaml, and no file there either."""


class ModelNotFetched(ModelError):
    """The model is registered but not on this disk; the message has the command that fetches it."""


class ModelHashMismatch(ModelError):
    """The file's sha256 is not the registered one."""


class ModelFetchFailed(ModelError):
    """The model could not be downloaded: offline, or an optional package is missing."""


class ModelsConfigInvalid(ModelError):
    """config/models.yaml breaks its schema."""


class WorkloadError(ModelError):
    """The workload text is not the registered one, or too short for the request."""


class UnknownToken(ModelError, LookupError):
    """A token id outside the vocabulary."""


class DecoderInUse(ModelError):
    """A decoder was asked for a step amid another one: by a second thread, or by one of its own regions."""


class NonFiniteLogits(ModelError):
    """The model gave NaN or infinity: no token can be chosen from it."""
