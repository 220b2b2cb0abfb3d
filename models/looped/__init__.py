"""A language model that goes through one block as often as is drawn: which character comes next?"""
