"""Chat templates of the kinds that people meet, and a tokenizer that knows their control tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}"
    "<|im_start|>assistant\n{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Thoughts of all turns but the last are left out, as Qwen3 does.
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ message.content }}\n{% endfor %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    + CHATML.replace("message['content']", "(message.content or '') + (message.tool_calls | tojson if"
                     " message.tool_calls else '')")
)  # fmt: skip

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How are you? é😀"},
    {"role": "assistant", "content": " Fine,  thanks. 😀"},
    {"role": "user", "content": "And\n\nnow?"},
    {"role": "assistant", "content": "Still fine.\n"},
]


def save_tokenizer(folder: Path, template: str | None = None, *, in_file: bool = False) -> Path:
    """A byte-level BPE tokenizer whose post-processor adds <s>, with an end-of-text token and maybe a template."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    words = " ".join(message["content"] for message in CHAT) + " user assistant system the answer is"
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([words] * 5, trainer)
    begin = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), begin])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    if template is not None and in_file:
        (folder / "chat_template.jinja").write_text(template)
    elif template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
