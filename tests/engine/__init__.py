# SPDX-License-Identifier: Apache-2.0
"""A harness for a real vLLM engine on this machine's CPU: a small model, real media, a server, and a watched encoder.

- `checkpoint` makes a small Qwen3-VL whose answers depend on the picture;
- `media` gives photographs and a clip;
- `server` runs `vllm serve`, `client` asks it, `encoder_probe` counts what its vision tower really encodes;
- `processes` ends what was started here, and nothing else.
"""
