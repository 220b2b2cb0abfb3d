"""A mixture of experts, one a sequence and layer: which character comes next in the source?"""
