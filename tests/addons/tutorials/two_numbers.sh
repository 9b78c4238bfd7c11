# The batch stands in two places, and is not the same.
deepspeed --num_gpus=8 train.py --deepspeed zero3_full.json --bf16 \
  --per_device_train_batch_size 4 --learning_rate 1e-5
