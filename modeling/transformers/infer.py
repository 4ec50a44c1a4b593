"""Run a Hugging Face model, with and without TileGym's kernels: the same program as ``tilegym infer``.

python modeling/transformers/infer.py --model_id meta-llama/Llama-3.1-8B --show_outputs
python modeling/transformers/infer.py --model_id meta-llama/Llama-3.1-8B --use_tilegym --use_cutile --use_attn
"""

import typer

from tilegym.infer import infer

if __name__ == "__main__":
    typer.run(infer)
