from train.fit_sets import SetTraining

DRAFTER = SetTraining(steps=3000, batch=320, learning_rate=0.02, decay_share=0.6)
