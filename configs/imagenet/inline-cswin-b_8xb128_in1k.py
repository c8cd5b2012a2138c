_base_ = './inline-cswin-t_8xb128_in1k.py'
model = dict(model_name='inline_cswin_base', drop_path_rate=0.5)
optim_wrapper = dict(optimizer=dict(weight_decay=0.1))
custom_hooks = [dict(type='EMAHook', momentum=8e-5, priority='ABOVE_NORMAL')]
