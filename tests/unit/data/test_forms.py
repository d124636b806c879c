"""Forms of rows: which tokens come out, which of them have a loss, and what is said of rows that are wrong."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nestsp.config import DataSource
from nestsp.data.chat import open_template
from nestsp.data.sources import open_source
from nestsp.data.store import LabelledTokens, TokenStore, open_store
from nestsp.data.tokenizer import open_tokenizer
from nestsp.errors import DataError
from tests.unit.data.chats import CHAT, CHATML, MARKED, save_tokenizer

IDS = [5, 6, 7, 8, 9, 300, 2]


def _build(
    folder: Path, rows: list[dict[str, Any]], tokenizer: str = "bytes", form: str = "auto", template: str | None = None
) -> TokenStore:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_store(
        open_source(DataSource(source=str(path))),
        open_tokenizer(tokenizer),
        folder / "stores",
        form=form,
        template=open_template(template, tokenizer),
    )


def _documents(store: TokenStore) -> list[tuple[list[int], list[int], list[float]]]:
    """Tokens, labels and weights of each document."""
    found = []
    for document in range(store.num_documents):
        tokens = store.read(document, 0, int(store.lengths[document]))
        assert isinstance(tokens, LabelledTokens)
        found.append((tokens.ids.tolist(), tokens.labels.tolist(), tokens.weights.tolist()))
    return found


def _refusal(folder: Path, rows: list[dict[str, Any]], **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        _build(folder, rows, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(folder), "FOLDER")


# tokens


def test_tokens_are_taken_as_they_are(tmp_path: Path) -> None:
    """Row C10: rows of input_ids alone need no position_ids."""
    store = _build(tmp_path, [{"input_ids": IDS}, {"input_ids": []}, {"input_ids": [1]}])
    assert [store.read(i, 0, int(n)).tolist() for i, n in enumerate(store.lengths)] == [IDS, [], [1]]  # type: ignore[union-attr]
    assert (store.vocab_size, store.meta["tokenizer"], store.meta["form"]) == (301, None, "tokens")
    assert store.weights is store.labels is None


def test_labels_are_aligned_with_tokens_and_minus_100_has_no_loss(tmp_path: Path) -> None:
    """Row C10."""
    store = _build(tmp_path, [{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}])
    assert _documents(store) == [([1, 2, 3, 4], [1, 2, 3, 4], [0, 0, 1, 1])]
    assert store.labels is None  # they are the tokens: no column of them
    assert store.document_targets is not None
    assert store.document_targets.tolist() == [2]


def test_labels_may_differ_from_tokens(tmp_path: Path) -> None:
    store = _build(tmp_path, [{"input_ids": [1, 2, 3], "labels": [1, -100, 70_000]}])
    assert _documents(store) == [([1, 2, 3], [1, 2, 70_000], [1, 0, 1])]
    assert store.vocab_size == 70_001


def test_the_first_token_is_never_a_target(tmp_path: Path) -> None:
    """Row C1: labels are shifted once, so nothing predicts it."""
    store = _build(tmp_path, [{"input_ids": [1, 2], "labels": [1, -100]}, {"input_ids": [3], "labels": [3]}])
    assert store.document_targets is not None
    assert store.document_targets.tolist() == [0, 0]


def test_weights_are_kept_as_they_are(tmp_path: Path) -> None:
    store = _build(tmp_path, [{"input_ids": [1, 2, 3], "weights": [0, 0.5, 2]}])
    assert _documents(store) == [([1, 2, 3], [1, 2, 3], [0, 0.5, 2])]
    assert store.weights is not None
    assert store.weights.dtype == np.float32


def test_weights_count_only_where_there_is_a_label(tmp_path: Path) -> None:
    store = _build(tmp_path, [{"input_ids": [1, 2, 3], "labels": [-100, 2, -100], "weights": [1, 0.5, 2]}])
    assert _documents(store)[0][2] == [0, 0.5, 0]


@pytest.mark.parametrize("name", ["loss_mask", "assistant_masks", "completion_mask"])
def test_masks_of_other_trainers_are_known(tmp_path: Path, name: str) -> None:
    store = _build(tmp_path, [{"input_ids": [1, 2, 3], name: [False, True, 1]}])
    assert _documents(store)[0][2] == [0, 1, 1]
    assert store.weights is not None
    assert store.weights.dtype == np.uint8


@pytest.mark.parametrize("mask", [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0]])
def test_pads_are_taken_off_at_either_end(tmp_path: Path, mask: list[int]) -> None:
    tokens = iter([4, 5, 6])
    ids = [next(tokens) if there else 0 for there in mask]
    labels = [token if there else -100 for token, there in zip(ids, mask, strict=True)]
    store = _build(tmp_path, [{"input_ids": ids, "attention_mask": mask, "labels": labels}])
    assert _documents(store) == [([4, 5, 6], [4, 5, 6], [1, 1, 1])]
    assert store.meta["notes"] == [["pads taken off", 2]]


def test_a_row_of_pads_alone_is_an_empty_document(tmp_path: Path) -> None:
    store = _build(
        tmp_path, [{"input_ids": [0, 0], "attention_mask": [0, 0]}, {"input_ids": [1], "attention_mask": [1]}]
    )
    assert store.lengths.tolist() == [0, 1]


@pytest.mark.parametrize(
    "bounds",
    [
        {"seq_lens": [3, 1, 3]},
        {"seq_lengths": [3, 1, 3]},
        {"cu_seqlens": [0, 3, 4, 7]},
        {"position_ids": [0, 1, 2, 0, 0, 1, 2]},
        {"position_ids": [0, 1, 2, 0, 0, 1, 2], "seq_lens": [3, 1, 3]},
    ],
)
def test_packed_rows_keep_their_boundaries(tmp_path: Path, bounds: dict[str, list[int]]) -> None:
    """Row E10's kind: what was packed is not one long sequence."""
    labels = [-100, 6, 7, 8, 9, 300, -100]
    store = _build(tmp_path, [{"input_ids": IDS, "labels": labels, **bounds}])
    assert [ids for ids, _, _ in _documents(store)] == [[5, 6, 7], [8], [9, 300, 2]]
    assert [weights for _, _, weights in _documents(store)] == [[0, 1, 1], [1], [1, 1, 0]]
    assert store.document_targets is not None
    assert store.document_targets.tolist() == [2, 0, 1]  # a sequence's first token follows nothing
    assert store.meta["notes"] == [["sequences cut out of packs", 3]]


def test_a_padded_pack_loses_its_pads_and_keeps_its_boundaries(tmp_path: Path) -> None:
    row = {
        "input_ids": [0, 0, *IDS],
        "attention_mask": [0, 0, *[1] * 7],
        "position_ids": [1, 1, 0, 1, 2, 0, 0, 1, 2],
    }
    assert _build(tmp_path, [row]).lengths.tolist() == [3, 1, 3]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"input_ids": "1 2"}, "has a string as 'input_ids', but it must be one list of whole numbers; mend it"),
        ({"input_ids": [1.5]}, "has a list as 'input_ids', but it must be one list of whole numbers; mend it"),
        ({"input_ids": [[1], [2]]}, "has a list of 2 levels as 'input_ids', but it must be one list of whole numbers"),
        ({"input_ids": [[1], [2, 3]]}, "has a list of 2 levels as 'input_ids'"),
        ({"input_ids": [True]}, "has a list as 'input_ids'"),
        ({"input_ids": [1, -1]}, "has token -1, but tokens are whole numbers from 0"),
        ({"input_ids": [1, 2**32]}, "has token 1, but"),
        ({"input_ids": [1, 2], "labels": [1]}, "has 1 labels for 2 input_ids, but needs one for each"),
        ({"input_ids": [1, 2], "labels": [1, -1]}, "has a label below 0 that is not -100"),
        ({"input_ids": [1, 2], "weights": [1, -1.0]}, "has a weight that is below 0 or not finite"),
        ({"input_ids": [1, 2], "weights": [1, float("nan")]}, "has a weight that is below 0 or not finite"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "has other numbers than 0 and 1 as 'loss_mask'"),
        ({"input_ids": [1, 2], "attention_mask": [1, 2]}, "has other numbers than 0 and 1 in 'attention_mask'"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "has pads between tokens"),
        ({"input_ids": [1, 2], "attention_mask": None}, "has null as 'attention_mask'"),
        ({"input_ids": [1, 2, 3], "seq_lens": [1, 1]}, "has seq_lens that do not cut its 3 tokens"),
        ({"input_ids": [1, 2, 3], "seq_lens": [3, 0]}, "has seq_lens that do not cut its 3 tokens"),
        ({"input_ids": [1, 2, 3], "cu_seqlens": [1, 3]}, "has cu_seqlens that do not cut its 3 tokens"),
        ({"input_ids": [1, 2, 3], "position_ids": [1, 2, 3]}, "has position_ids that do not begin at 0"),
        ({"input_ids": [1, 2, 3], "position_ids": [0, 2, 3]}, "has position_ids that do not count up by 1"),
        ({"input_ids": [1, 2, 3], "position_ids": [[0, 1, 2]] * 3}, "has a list of 2 levels as 'position_ids'"),  # C12
        (
            {"input_ids": [1, 2, 3], "position_ids": [0, 1, 2], "seq_lens": [1, 2]},
            "has seq_lens and position_ids that cut it differently",
        ),
    ],
)
def test_a_row_of_tokens_that_makes_no_sense_is_named(tmp_path: Path, row: dict[str, Any], sentence: str) -> None:
    """Row C12 among others: positions of three axes are refused, never half read."""
    good: dict[str, Any] = {name: [] for name in row} | {"input_ids": []}
    assert _refusal(tmp_path, [good, row]).startswith(f"FOLDER/rows.jsonl, line 2, {sentence}")


# all rows alike


def test_a_column_that_only_later_rows_have_is_refused(tmp_path: Path) -> None:
    sentence = _refusal(tmp_path, [{"input_ids": [1]}, {"input_ids": [1], "labels": [-100]}])
    assert sentence == (
        "FOLDER/rows.jsonl, line 2, has 'labels', but the first row has none, so its meaning would be lost; give it to "
        "all rows or to none"
    )
    assert "has 'input_ids', but it needs the field 'labels'" in _refusal(
        tmp_path, [{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}]
    )


def test_columns_of_no_form_are_refused(tmp_path: Path) -> None:
    assert _refusal(tmp_path, [{"content": "a", "id": 1}]) == (
        "data.source FOLDER/rows.jsonl has the columns content, id, but a sample has those of one form (tokens: "
        "input_ids; chat: messages; prompt_completion: prompt and completion; preference: prompt and chosen "
        "and rejected; text: text); rename or add columns"
    )
    assert "but data.format is chat (" in _refusal(tmp_path, [{"text": "a"}], form="chat")


def test_the_form_can_be_told(tmp_path: Path) -> None:
    row = {"text": "abc", "input_ids": [1, 2]}
    assert _build(tmp_path, [row]).meta["form"] == "tokens"
    store = _build(tmp_path, [row], form="text")
    assert (store.meta["form"], bytes(store.tokens), store.meta["ignored"]) == ("text", b"abc", ["input_ids"])


def test_two_columns_that_say_what_has_a_loss_are_refused(tmp_path: Path) -> None:
    row = {"input_ids": [1], "weights": [1], "loss_mask": [1]}
    assert "has weights and loss_mask, but one column says which tokens have a loss" in _refusal(tmp_path, [row])


# chats


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["chatml", "marked"])
def test_of_a_chat_exactly_the_assistants_tokens_have_a_loss(tmp_path: Path, template: str) -> None:
    folder = str(save_tokenizer(tmp_path / "tokenizer", template))
    store = _build(tmp_path, [{"messages": CHAT}, {"messages": CHAT[:2]}], folder)
    backend = open_tokenizer(folder, append_eos=False)
    (ids, labels, weights), (_, _, others) = _documents(store)
    assert ids == labels
    chat = open_template(None, folder)
    assert chat is not None
    text, spans = chat.chat(CHAT)
    # A template's special tokens are boundaries: each stretch tokenised by itself gives the same tokens.
    expected_ids: list[int] = []
    expected_weights: list[int] = []
    edges = sorted({0, len(text), *(edge for span in spans for edge in span)})
    for start, stop in itertools.pairwise(edges):
        [(part, _, _)] = backend.encode_marked([text[start:stop]], [()], whole=False)
        expected_ids += part.tolist()
        expected_weights += [int(any(a <= start and stop <= b for a, b in spans))] * part.size
    assert (ids, weights) == (expected_ids, expected_weights)
    assert sum(weights) > 10
    assert sum(others) == 0  # no turn of an assistant, no target


def test_a_chat_is_kept_as_its_template_ends_it(tmp_path: Path) -> None:
    folder = str(save_tokenizer(tmp_path / "tokenizer", CHATML))
    store = _build(tmp_path, [{"messages": CHAT}], folder)
    tokens = store.tokens.tolist()
    assert 0 not in tokens  # <s>
    assert 1 not in tokens  # </s>


def test_columns_that_a_form_does_not_read_change_nothing(tmp_path: Path) -> None:
    """A chat beside a column that another form would read: JSON lines carry all their fields along."""
    folder = str(save_tokenizer(tmp_path / "tokenizer", CHATML))
    plain = _build(tmp_path, [{"messages": CHAT}], folder)
    more = _build(tmp_path, [{"messages": CHAT, "prompt": "x", "text": "y", "weights": [1]}], folder)
    assert more.meta["form"] == "chat"
    assert _documents(more) == _documents(plain)
    assert more.meta["ignored"] == ["prompt", "text", "weights"]


def test_a_conversation_as_prompt_and_completion(tmp_path: Path) -> None:
    folder = str(save_tokenizer(tmp_path / "tokenizer", CHATML))
    whole = _build(tmp_path, [{"messages": CHAT[:3]}], folder)
    split = _build(tmp_path, [{"prompt": CHAT[:2], "completion": CHAT[2:3]}], folder)
    assert split.meta["form"] == "prompt_completion"
    assert _documents(split) == _documents(whole)


@pytest.mark.parametrize("chats", [False, True])
def test_A14_a_preference_is_two_prompts_with_their_completions(tmp_path: Path, chats: bool) -> None:
    folder = str(save_tokenizer(tmp_path / "tokenizer", CHATML))
    other = {"role": "assistant", "content": "no"}
    answers: list[Any] = [CHAT[2:3], [other]] if chats else [" yes", " no, not at all"]
    prompts: list[Any] = [CHAT[:2], [CHAT[0]]] if chats else ["one", "two"]
    pairs = [{"prompt": prompt, "chosen": answers[0], "rejected": answers[1], "score": 3} for prompt in prompts]
    store = _build(tmp_path, pairs, folder)
    assert store.meta["form"] == "preference"
    assert store.meta["ignored"] == ["score"]
    apart = [{"prompt": prompt, "completion": answer} for prompt in prompts for answer in answers]
    assert _documents(store) == _documents(_build(tmp_path, apart, folder))
    assert all(0 < sum(weights) < len(weights) for _, _, weights in _documents(store))


def test_an_answer_of_another_kind_than_its_prompt_is_refused_by_its_own_name(tmp_path: Path) -> None:
    row = {"prompt": "one", "chosen": "yes", "rejected": [{"role": "assistant", "content": "no"}]}
    assert "has a list as 'rejected', but it must be a string; mend or remove it" in _refusal(tmp_path, [row])


def test_a_chat_with_bytes_and_a_template_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
                                        "{% if add_generation_prompt %}a:{% endif %}")  # fmt: skip
    rows = [{"messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": "ü!"}]}]
    store = _build(tmp_path, rows, template=str(tmp_path / "own.jinja"))
    [(ids, _, weights)] = _documents(store)
    assert bytes(ids) == "u:é|a:ü!|".encode()
    assert bytes(i for i, w in zip(ids, weights, strict=True) if w) == "ü!|".encode()


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ("hello", "has a string as 'messages', but it must be a list of messages"),
        (["hello"], "has a list as 'messages', but it must be a list of messages"),
        ([{"content": "hello"}], "has no role in turn 0 of 'messages'"),
        ([{"role": "user", "content": "\ud800"}], "has half a surrogate pair in 'messages'"),
        ([{"role": "user", "content": 3}], "is a chat that the chat template of FOLDER/tokenizer does not take ("),
    ],
)
def test_a_chat_that_makes_no_sense_is_named(tmp_path: Path, messages: Any, sentence: str) -> None:
    folder = str(save_tokenizer(tmp_path / "tokenizer", CHATML))
    found = _refusal(tmp_path, [{"messages": CHAT}, {"messages": messages}], tokenizer=folder)
    assert found.startswith(f"FOLDER/rows.jsonl, line 2, {sentence}")


def test_chats_without_a_template_are_refused(tmp_path: Path) -> None:
    sentence = "has chats, but the tokenizer has no chat template; set data.chat_template to a file with one, or name"
    assert sentence in _refusal(tmp_path, [{"messages": CHAT}])


# prompt and completion


def test_of_a_prompt_and_its_completion_the_completion_has_a_loss(tmp_path: Path) -> None:
    store = _build(tmp_path, [{"prompt": "é? ", "completion": "yes"}, {"prompt": "", "completion": ""}])
    (ids, _, weights), (nothing, _, _) = _documents(store)
    assert bytes(ids) == "é? yes".encode()
    assert weights == [0] * 4 + [1] * 3
    assert nothing == []


def test_a_completion_is_tokenised_with_its_prompt_and_ends_with_end_of_text(tmp_path: Path) -> None:
    folder = str(save_tokenizer(tmp_path / "tokenizer"))
    tokenizer = open_tokenizer(folder)
    rows = [{"prompt": "the user", "completion": " is fine"}, {"prompt": "the us", "completion": "er is fine"}]
    store = _build(tmp_path, rows, folder)
    [whole] = tokenizer.encode_batch(["the user is fine"])
    for ids, _, weights in _documents(store):
        assert ids == whole.tolist()
        assert (ids[0], ids[-1], weights[0], weights[-1]) == (0, 1, 0, 1)
    first, second = (weights for _, _, weights in _documents(store))
    [prompt] = open_tokenizer(folder, append_eos=False).encode_batch(["the user"])
    assert first == [0] * prompt.size + [1] * (whole.size - prompt.size)
    assert sum(second) >= sum(first)  # a token that both share is the completion's
    assert store.meta["notes"] == [
        ["tokens with a loss that also hold characters without one", sum(second) - sum(first)]
    ]


def test_spans_that_cut_a_space_off_are_exact_in_spite_of_the_post_processor(tmp_path: Path) -> None:
    """Byte-level post-processors trim spaces off offsets, which would take a loss from a token that is all space."""
    folder = str(save_tokenizer(tmp_path / "tokenizer"))
    store = _build(tmp_path, [{"prompt": "a", "completion": " \n\n b"}], folder)
    [(ids, _, weights)] = _documents(store)
    assert weights == [0, 0, *[1] * (len(ids) - 2)]


# the key


def test_whatever_shapes_the_columns_makes_another_store(tmp_path: Path) -> None:
    marked, plain = (str(save_tokenizer(tmp_path / name, t)) for name, t in (("marked", MARKED), ("plain", CHATML)))
    (tmp_path / "own.jinja").write_text("." + CHATML)
    rows = [{"messages": CHAT, "text": "a"}]
    stores = [
        _build(tmp_path, rows, marked),
        _build(tmp_path, rows, plain),
        _build(tmp_path, rows, plain, template=str(tmp_path / "own.jinja")),
        _build(tmp_path, rows, plain, form="text"),
        _build(tmp_path, [*rows, *rows], plain),
    ]
    assert len({store.key for store in stores}) == len(stores)
    assert _build(tmp_path, rows, marked).key == stores[0].key
