deepspeed --num_gpus 6 fastchat/train/train_lora.py --lora_r 8 --fp16 True --per_device_train_batch_size 2 --deepspeed $PATH_TO_DEEPSPEED_CONFIG_S2 --gradient_checkpointing True
