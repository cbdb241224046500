# The program of the document of the multi-process episode batcher (rlstructures v0.1), pieced
# together from its fragments, with its imports renamed and nothing else, except where a comment
# says so.

from rlpool import Agent,DictTensor
import torch
import os
import sys
import gymnasium as gym
from gymnasium.wrappers import TimeLimit
from rlpool import GymEnv
from rlpool import EpisodeBatcher,Batcher
import gymnasium as gym
from gymnasium.utils import seeding

class MyEnv(gym.Env):
    def __init__(self):
        super().__init__()

    def seed(self,seed=None):
        self.np_random,seed=seeding.np_random(seed)

    def reset(self,env_info={"env_id":0}):
        assert "env_id" in env_info
        self.env_id=env_info["env_id"]
        self.x=self.np_random.rand()*2.0-1.0
        self.identifier=self.np_random.rand()
        obs={"x":self.x,"identifier":self.identifier,"env_id":self.env_id}
        return obs

    def step(self,action):
        if action==0:
            self.x-=0.3
        else:
            self.x+=0.3
        done = self.x<-1 or self.x>1

        obs={"x":self.x,"identifier":self.identifier,"env_id":self.env_id},self.x,done,{}
        return obs

class UniformAgent(Agent):
    def __init__(self,n_actions):
        super().__init__()
        self.n_actions=n_actions

    def __call__(self,state,observation,agent_info=None,history=None):
        B=observation.n_elems()
        agent_state=None

        #Initialize agent_info is not specified
        if agent_info is None:
            agent_info=DictTensor({"agent_id":torch.tensor([0]).repeat(B)})

        #initialize the state of the agent if not specified
        if state is None:
            agent_state=DictTensor({"timestep":torch.zeros(B).long()})
        else:
            agent_state=state

        scores=torch.randn(B,self.n_actions)
        probabilities=torch.softmax(scores,dim=1)
        actions=torch.distributions.Categorical(probabilities).sample()
        new_state=DictTensor({"timestep":agent_state["timestep"]+1})
        # We also decide to output the action probabilities
        return agent_state,DictTensor({"action":actions,"action_probabilities":probabilities,"agent_id":agent_info["agent_id"]}),new_state

def create_env(seed=0,max_episode_steps=100):
    envs=[]
    for k in range(4):
        e=MyEnv()
        e=TimeLimit(e, max_episode_steps=max_episode_steps)
        envs.append(e)
    return GymEnv(envs,seed=seed)

def create_agent(buffer=None,n_actions=None):
    # Here, the buffer argument must be specified
    # Changed from UniformAgent(buffer,n_actions): its __init__ above takes no buffer.
    return UniformAgent(n_actions)

if __name__ == "__main__":
    import torch.multiprocessing as mp
    mp.set_start_method("spawn")

    # Indented from here on, because the document continues inside its main guard.
    batcher=EpisodeBatcher(
            n_timesteps=100,
            n_slots=128,
            n_threads=4,
            seeds=[1,2,3,4],
            create_agent=create_agent,
            agent_args={"n_actions":2},
            create_env=create_env,
            env_args={"max_episode_steps":100}
    )

    agent_info=DictTensor({"agent_id":torch.arange(32)})
    env_info=DictTensor({"env_id":torch.arange(32)})

    batcher.execute(n_episodes=32,agent_info=agent_info,env_info=env_info)

    trajectories=batcher.get(blocking=True)

    first_trajectories=trajectories # Added: kept for inspection; the next line reuses the name.

    batcher.reexecute()
    trajectories=batcher.get()
