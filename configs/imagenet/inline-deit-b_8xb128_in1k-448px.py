_base_ = './inline-deit-t_8xb128_in1k.py'
model = dict(model_name='inline_deit_base')

# 448 pixels in training, the middle 448 of 512 in testing.
train_pipeline = _base_.train_pipeline
train_pipeline[1].update(scale=448)
test_pipeline = _base_.test_pipeline
test_pipeline[1].update(scale=512)
test_pipeline[2].update(crop_size=448)
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
