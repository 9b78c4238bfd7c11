# One node, as the Hugging Face guides start it.
deepspeed --num_gpus=2 run_translation.py \
  --deepspeed trainer_auto.json \
  --model_name_or_path t5-small --per_device_train_batch_size 1 --output_dir out --fp16
