"""Training by Megatron-Bridge's recipe of Qwen3-30B-A3B, made small by overrides, on CPUs with mock data.

The recipe reads the model's size from ``Qwen/Qwen3-30B-A3B/config.json`` in the working directory.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from megatron.bridge.recipes.qwen import qwen3_30b_a3b_pretrain_config
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

from megatron.moevement.bridge.recipes import use_cpu

parser = argparse.ArgumentParser()
parser.add_argument("--work", required=True)
parser.add_argument("--iterations", type=int, default=12)
parser.add_argument("--pipeline", type=int, default=1)
parser.add_argument("--experts", type=int, default=2)
parser.add_argument("--save")
parser.add_argument("--exit-after", type=int)
args = parser.parse_args()
os.chdir(args.work)

MODEL: dict[str, Any] = {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": args.pipeline,
    "expert_model_parallel_size": args.experts, "sequence_parallel": False, "seq_length": 32,
}  # fmt: skip


class Report(Callback):
    """Callback that prints a line after each step."""

    def on_train_step_end(self, context: CallbackContext) -> None:
        print(f"step {context.state.train_state.step + 1}", flush=True)


cfg = qwen3_30b_a3b_pretrain_config()
use_cpu(cfg)
for name, value in MODEL.items():
    setattr(cfg.model, name, value)
cfg.tokenizer.tokenizer_type, cfg.tokenizer.tokenizer_model = "NullTokenizer", None
cfg.tokenizer.hf_tokenizer_kwargs, cfg.tokenizer.vocab_size = {}, 256
cfg.dataset.seq_length, cfg.dataset.num_workers = 32, 0
cfg.train.train_iters, cfg.train.global_batch_size, cfg.train.micro_batch_size = args.iterations, 4, 1
cfg.train.exit_interval = args.exit_after
cfg.validation.eval_iters, cfg.validation.eval_interval = 2, 4
cfg.logger.log_interval, cfg.logger.tensorboard_dir = 1, None
cfg.checkpoint.save = cfg.checkpoint.load = args.save
cfg.checkpoint.save_interval = 4
cfg.scheduler.lr_warmup_iters = 1
pretrain(cfg, forward_step, callbacks=[Report()])
