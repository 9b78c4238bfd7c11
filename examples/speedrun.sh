#!/usr/bin/env bash
# From nothing to a small model that talks. Read it from top to bottom: it is the whole way.
#
#   examples/speedrun.sh          one node with GPUs: 12 layers, 20 tokens a parameter; downloads text and chats
#   examples/speedrun.sh cpu      a CPU, some minutes, no download: the text is Python's standard library; it learns words,
#                             not sense
#
# DEPTH is the one dial: layers. Width, heads, tokens and steps follow from it. OUT is where everything goes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
WHERE=${1:-gpu}
OUT=${OUT:-build/speedrun-$WHERE}
mkdir -p "$OUT"

# ---- 1. An environment: torch, transformers, DeepSpeed, Megatron-core at the tested versions
[ -x .venv/bin/kit ] || make setup
export PATH="$PWD/.venv/bin:$PATH"

# ---- 2. Sizes
if [ "$WHERE" = cpu ]; then
    DEPTH=${DEPTH:-2} CLUSTER=1xcpu VOCABULARY=2048 LENGTH=128 BATCH=16 PRECISION=fp32 RATE=5e-3 STEPS=${STEPS:-150}
else
    DEPTH=${DEPTH:-12} CLUSTER=local VOCABULARY=32768 LENGTH=2048 BATCH=256 PRECISION=bf16 RATE=1e-3
fi
HIDDEN=$((DEPTH * 64))
PARAMETERS=$((12 * DEPTH * HIDDEN * HIDDEN + VOCABULARY * HIDDEN))
STEPS=${STEPS:-$((20 * PARAMETERS / (LENGTH * BATCH)))}

# ---- 3. Text and chats: corpus.jsonl to learn a language from, chats.jsonl to learn to answer
python - "$WHERE" "$OUT" <<'PY'
import inspect, importlib, json, pathlib, sys, sysconfig

where, out = sys.argv[1], pathlib.Path(sys.argv[2])
if where == "cpu":
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_text(errors="replace") for path in sorted(library.glob("*.py"))]
    chats = []
    for name in ("collections", "inspect", "io", "json", "logging", "os", "pathlib", "random", "re", "shutil", "socket",
                 "statistics", "subprocess", "textwrap", "threading", "tokenize", "typing", "urllib.parse", "zipfile"):
        for symbol, value in sorted(vars(importlib.import_module(name)).items()):
            if not symbol.startswith("_") and callable(value) and (said := inspect.getdoc(value)):
                answer = " ".join(said.split("\n\n")[0].split())
                chats.append((f"What does {name}.{symbol} do?", answer[:200]))
else:
    from datasets import load_dataset  # from the Hugging Face Hub; any text and any chats will do

    texts = (row["text"] for row in load_dataset("HuggingFaceFW/fineweb-edu", "sample-10BT", split="train"))
    rows = load_dataset("HuggingFaceTB/smol-smoltalk", split="train")
    chats = ([turn["content"] for turn in row["messages"][:2]] for row in rows if row["messages"][0]["role"] == "user")
files = {part: (out / f"{part}.jsonl").open("w") for part in ("train", "validation", "chats", "chats-validation")}
for index, text in enumerate(texts):
    files["validation" if index % 50 == 49 else "train"].write(json.dumps({"text": text}) + "\n")
for index, (question, answer) in enumerate(chats):
    row = {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    files["chats-validation" if index % 20 == 19 else "chats"].write(json.dumps(row) + "\n")
PY

# ---- 4. A tokenizer: byte-level BPE, trained on that text
python - "$OUT" "$VOCABULARY" <<'PY'
import itertools, json, sys

from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

out, size = sys.argv[1], int(sys.argv[2])
with open(f"{out}/train.jsonl") as lines:
    bpe = ByteLevelBPETokenizer()
    texts = (json.loads(line)["text"] for line in itertools.islice(lines, 100_000))
    bpe.train_from_iterator(texts, vocab_size=size, special_tokens=["<|end|>"], show_progress=False)
fast = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|end|>", pad_token="<|end|>")
fast.chat_template = (
    "{% for message in messages %}{{ '<' + message.role + '> ' + message.content }}"
    "{{ eos_token if message.role == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
fast.save_pretrained(f"{out}/tokenizer")
PY

# ---- 5. Tokens, in the format of Megatron, which all three engines read
for part in train validation; do
    kit convert data "$OUT/$part.jsonl" --tokenizer "$OUT/tokenizer" --out "$OUT/$part"
done
for part in chats chats-validation; do
    kit convert data "$OUT/$part.jsonl" --objective sft --seq-length "$LENGTH" --tokenizer "$OUT/tokenizer" --out "$OUT/$part"
done

# ---- 6. Pretrain: a recipe says what, the planner says how, and the run directory is what runs
cat >"$OUT/pretrain.yaml" <<YAML
model:
  {name: speedrun, family: llama, num_layers: $DEPTH, hidden_size: $HIDDEN, ffn_hidden_size: $((HIDDEN * 3)),
   num_attention_heads: $((HIDDEN / 64)), num_key_value_heads: $((HIDDEN / 64)), head_dim: 64,
   vocab_size: $VOCABULARY, max_position_embeddings: $LENGTH}
cluster: $CLUSTER
job: {seq_length: $LENGTH, global_batch_size: $BATCH, precision: $PRECISION, learning_rate: $RATE}
run:
  data: {train: train, validation: validation}
  steps: $STEPS
  checkpoint: {every_steps: $STEPS}
YAML
kit plan "$OUT/pretrain.yaml"
kit train "$OUT/pretrain.yaml" --out "$OUT/pretrained"
kit convert model "$OUT/pretrained/checkpoints/step-$(printf %08d "$STEPS")" --out "$OUT/base" \
    --extras-from "$OUT/tokenizer"

# ---- 7. Teach it to answer: two passes over the chats, from those weights
CHATS=$(wc -l <"$OUT/chats.jsonl")
TURNS=$((2 * CHATS / BATCH + 1))
cat >"$OUT/chat.yaml" <<YAML
model: base
cluster: $CLUSTER
job:
  {objective: sft, seq_length: $LENGTH, global_batch_size: $BATCH, precision: $PRECISION, learning_rate: 1e-3}
run:
  model_path: base
  data: {train: chats, validation: chats-validation}
  steps: $TURNS
  checkpoint: {every_steps: $TURNS}
YAML
kit train "$OUT/chat.yaml" --out "$OUT/chatted"
kit convert model "$OUT/chatted/checkpoints/step-$(printf %08d "$TURNS")" --out "$OUT/model" \
    --extras-from "$OUT/tokenizer"

# ---- 8. Talk. The model is a Hugging Face model: transformers, vLLM and llama.cpp take it as it is
python - "$OUT/model" "${QUESTION:-What does json.loads do?}" <<'PY'
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained(sys.argv[1]), AutoModelForCausalLM.from_pretrained(sys.argv[1])
chat = [{"role": "user", "content": sys.argv[2]}]
prompt = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True), return_tensors="pt")
answer = model.generate(prompt.input_ids, max_new_tokens=60, do_sample=False)[0, prompt.input_ids.shape[1] :]
print(f"\n> {sys.argv[2]}\n{tokenizer.decode(answer, skip_special_tokens=True)}")
PY
