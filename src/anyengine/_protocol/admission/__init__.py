"""Admission: what is refused before anything is sent, since an engine would not survive it (PROTOCOL §12).

Pure functions over plain values, structs and what is known of the engine.
"""

from .limits import EngineLimits
from .prompt import check_prompt, check_prompt_length, check_token_ids, output_budget
from .request import check_request
from .utility import check_utility

__all__ = [
    "EngineLimits",
    "check_prompt",
    "check_prompt_length",
    "check_request",
    "check_token_ids",
    "check_utility",
    "output_budget",
]
