"""Pre-train a GPT model with Megatron: ``torchrun … scripts/pretrain_gpt.py --help``."""

from dynatrain_megatron.plugin.pretrain_gpt import main

if __name__ == "__main__":
    main()
