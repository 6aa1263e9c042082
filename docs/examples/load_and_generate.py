"""Continue a prompt with the best checkpoint of a run.

`.venv/bin/python docs/examples/load_and_generate.py [RUN]`, after `start_training.py`.
"""

import sys

import torch

import refocused

model, tokenizer = refocused.load(sys.argv[1] if len(sys.argv) > 1 else "runs/example", "best")
inputs = tokenizer("def ", return_tensors="pt").to(model.device)
torch.manual_seed(0)
output = model.generate(**inputs, max_new_tokens=60, do_sample=True, top_k=40)
print(tokenizer.decode(output[0]))
