_base_ = './inline-deit-t_8xb128_in1k.py'
model = dict(model_name='inline_deit_small')

# 288 pixels in training, the middle 288 of 329 in testing.
train_pipeline = _base_.train_pipeline
train_pipeline[1].update(scale=288)
test_pipeline = _base_.test_pipeline
test_pipeline[1].update(scale=329)
test_pipeline[2].update(crop_size=288)
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
