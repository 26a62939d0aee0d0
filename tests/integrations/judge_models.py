"""Small models for transformers' common model tests: copied beside these by ``judges.py``, which says what that is.

It is a module of their test package there, and nothing of it runs here.
"""

import unittest

import tiny_models
import transformers

from . import test_modeling_common as common


class SmallModel:
    """What their tests ask of the small model of a family: its configuration, and inputs for it."""

    batch_size, seq_length, is_training = 3, 7, True

    def __init__(self, family):
        self.config = tiny_models.config_of(family)
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
            setattr(self, name, getattr(self.config, name, None))

    def prepare_config_and_inputs_for_common(self):
        ids = common.ids_tensor([self.batch_size, self.seq_length], self.config.vocab_size)
        return type(self.config).from_dict(self.config.to_dict()), {"input_ids": ids, "attention_mask": ids.ne(-1).long()}


def tests_of(family):
    """Their common tests, of one family's models."""

    def setUp(self):
        self.model_tester = SmallModel(family)

    stem = tiny_models.FAMILIES[family][0]
    names = (f"{stem}TextModel", f"{stem}Model", f"{stem}ForCausalLM")
    config = type(tiny_models.config_of(family))
    found = [model for name in names if (model := getattr(transformers, name, None)) and model.config_class is config]
    members = {"setUp": setUp, "all_model_classes": tuple(found), "test_resize_embeddings": False, "has_attentions": False}
    return type(f"Test_{family}", (common.ModelTesterMixin, common.GenerationTesterMixin, unittest.TestCase), members)


for _family in tiny_models.FAMILIES:
    globals()[f"Test_{_family}"] = tests_of(_family)
