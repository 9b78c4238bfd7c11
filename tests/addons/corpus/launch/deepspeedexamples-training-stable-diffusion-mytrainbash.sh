accelerate launch train_sd_distil_lora.py --pretrained_model_name_or_path=$MODEL_NAME --resolution=512 --train_batch_size=1 --gradient_accumulation_steps=1 --learning_rate=5e-6
