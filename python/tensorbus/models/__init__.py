"""Models to test and show with: real small weights, made ones, and a plain PyTorch decoder to run them.

Every model is a folder in the Hugging Face style: `config.json`, `*.safetensors`, tokenizer files.

    python -m tensorbus.models smollm2               prints the folder of SmolLM2-135M-Instruct, made on first use
    python -m tensorbus.models made --out DIR ...    writes a seeded Llama-shaped model

Needs torch (`pip install tensorbus[torch]`); SmolLM2's conversion also needs gguf and tokenizers.
"""
