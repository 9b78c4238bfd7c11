"""Why docs/pipeline-choice.md turns AutoEP down; when this fails, it is time to look again."""

from __future__ import annotations

import pytest
from transformers.utils import output_capturing


def test_transformers_registry_refuses_what_autoep_asks() -> None:
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        output_capturing._CAN_RECORD_REGISTRY.get("a class's name", None)
