# A batch for 4 GPUs on 3.
deepspeed --num_gpus 3 train.py --deepspeed_config four_gpus.json
