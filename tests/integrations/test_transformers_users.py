"""What users of transformers do with a model, on linattn: generate, copy, save, train in less memory, in several threads."""

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import tiny_models

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import linattn.integrations.transformers as integration  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default", "error::linattn.integrations.seams.FallbackWarning")

WAYS = [(family, fuse) for family in ("kimi_linear", "nemotron_h", "qwen3_next") for fuse in (False, True)]
WITHOUT_EXPERTS = [(family, fuse) for family in ("bamba", "olmo_hybrid", "qwen3_5") for fuse in (False, True)]
"""Which experts a token goes to is another thing in 16 bits."""


def generated(model: Any, **options: Any) -> list[list[int]]:
    """Tokens of a batch of prompts of three lengths, padded on the left."""
    ids = torch.randint(3, 99, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(9) >= torch.tensor([[0], [3], [6]])
    tokens = model.generate(ids * mask, attention_mask=mask.long(), max_new_tokens=6, min_new_tokens=6, **options)
    return tokens.tolist()


def taught(model: Any) -> dict[str, Any]:
    """Gradients, by parameter."""
    ids = torch.randint(3, 99, (2, 21), generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def agree(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-3) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert found[name].dtype == gradient.dtype
        atol = tolerance * gradient.abs().max().item()
        torch.testing.assert_close(
            found[name], gradient, rtol=tolerance, atol=atol, msg=lambda said, name=name: f"{name}: {said}"
        )


@pytest.mark.parametrize(("family", "fuse"), WAYS)
@pytest.mark.parametrize(
    "options",
    [{"do_sample": False}, {"num_beams": 3, "do_sample": False}, {"do_sample": False, "cache_implementation": "static"}],
    ids=["greedy", "beams", "a static cache"],
)
def test_prompts_of_several_lengths_are_continued_as_without(family: str, fuse: bool, options: dict[str, Any]) -> None:
    """A search by beams reorders the caches of what it goes on with."""
    model = tiny_models.model_of(family)
    expected = generated(model, **options)
    with integration.enable(fuse=fuse):
        assert generated(model, **options) == expected


@pytest.mark.parametrize(("family", "fuse"), WAYS)
def test_a_prompt_may_be_read_in_parts(family: str, fuse: bool) -> None:
    model, ids = tiny_models.model_of(family), torch.randint(3, 99, (2, 20))
    with integration.enable(fuse=fuse), torch.no_grad():
        whole, cache = model(ids).logits, transformers.DynamicCache(config=model.config)
        given = {integration.cache_parameter(model.forward): cache, "use_cache": True}
        parts = [model(part, **given).logits for part in ids.split([11, 1, 7, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("family", "fuse"), WAYS)
def test_a_model_is_copied_pickled_and_saved_as_without(family: str, fuse: bool, tmp_path: Path) -> None:
    """What was written while linattn was in it is read without linattn in it."""
    model, ids = tiny_models.model_of(family), torch.randint(3, 99, (2, 20))
    names = list(model.state_dict())
    with integration.enable(fuse=fuse):
        model.save_pretrained(tmp_path)
        copies, text = [copy.deepcopy(model), type(model).from_pretrained(tmp_path).eval()], pickle.dumps(model)
        assert list(model.state_dict()) == names
    copies += [pickle.loads(text), type(model).from_pretrained(tmp_path).eval()]
    with torch.no_grad():
        expected = model(ids).logits
        for other in copies:
            assert list(other.state_dict()) == names
            torch.testing.assert_close(other(ids).logits, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("family", "fuse"), WAYS)
def test_layers_that_are_computed_again_have_the_same_gradients(family: str, fuse: bool) -> None:
    model = tiny_models.model_of(family).train()
    expected = taught(model)
    model.gradient_checkpointing_enable()
    with integration.enable(fuse=fuse):
        agree(taught(model), expected)


@pytest.mark.parametrize(("family", "fuse"), WAYS)
def test_frozen_weights_get_no_gradient_and_the_others_the_same(family: str, fuse: bool) -> None:
    model = tiny_models.model_of(family)
    for name, p in model.named_parameters():
        p.requires_grad_("embed" in name or "conv1d" in name)
    expected = taught(model)
    with integration.enable(fuse=fuse):
        agree(taught(model), expected)


@pytest.mark.parametrize(("family", "fuse"), WITHOUT_EXPERTS)
def test_gradients_of_autocast_have_the_dtypes_of_the_weights(family: str, fuse: bool) -> None:
    model = tiny_models.model_of(family)
    with torch.autocast("cpu", torch.bfloat16), integration.enable(fuse=fuse):
        found = taught(model)
    expected = taught(model)
    assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in expected.items()}
    for name, gradient in expected.items():
        off = (found[name] - gradient).norm() / gradient.norm()
        assert off < 0.1, f"{name}: {off:.2g}"


def test_threads_go_on_while_another_enables_and_disables() -> None:
    model, ids = tiny_models.model_of("qwen3_next"), torch.randint(3, 99, (2, 20))
    with torch.no_grad():
        expected = model(ids).logits
    continued, wrong, over = generated(model, do_sample=False), [], threading.Event()

    def work() -> None:
        try:
            while not over.is_set():
                with torch.no_grad():
                    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-3, atol=1e-5)
                assert generated(model, do_sample=False) == continued
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for n in range(6):
        with integration.enable(fuse=n % 2 == 1):
            pass
    over.set()
    for thread in threads:
        thread.join()
    assert wrong == []
