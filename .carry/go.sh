t0=$(date +%s); say(){ echo "[$(( $(date +%s)-t0 ))] $*"; }
mkdir -p $HOME/site $HOME/new $HOME/old; (xz -dc .carry/A.tar.xz | tar -C $HOME/site -xf -) & (xz -dc .carry/old.tar.xz | tar -C $HOME/old -xf -) & wait
ln -sfn $PWD $HOME/new/headrace
S=$HOME/site; [ -d $S/site ] && P=$S/site:$S/mc19 || P=$S:$S/mc19
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 COLUMNS=150 TORCHINDUCTOR_CACHE_DIR=/tmp/ind
python3 -m compileall -q -j 32 $S >/dev/null 2>&1
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader | head -1; PYTHONPATH=$P python3 -c "import torch,transformers;print(torch.__version__,transformers.__version__)"; python3 -m pytest --version 2>&1 | head -1
cd $HOME; say setup
b(){ tree=$1; gpus=$2; lim=$3; name=$4; shift 4; CUDA_VISIBLE_DEVICES=$gpus PYTHONPATH=$P:$HOME/$tree timeout $lim python3 -m headrace.cli bench gpu --baseline none --limit-s $lim --out $HOME/r/$name --model $HOME/m-$name "$@" > $OUT/$name.log 2>&1; rc=$?; say "$name rc $rc"; grep -E "step_s|tokens_per_s |tokens_per_s_per|mfu|peak_gib|first_loss|grad_norm|check.own.grad|check.exact.grad|share.experts|share.nccl|share.idle|share.matmul|share.attention|share.index|share.copy" $OUT/$name.log | tr -s ' │' ' ' | tr '\n' ';'; echo; [ $rc = 0 ] || tail -25 $OUT/$name.log | cut -c1-300; }
mkdir -p r
PYTHONPATH=$P:$HOME/new python3 - <<'P' > $OUT/window.log 2>&1
import torch, torch.nn.functional as F
from headrace.trainers.backends.fsdp.causal_lm import attend_varlen
torch.manual_seed(0)
for lengths in ((5,1,130,64),(9000,),(9000,3)):
    ends=torch.tensor([0,*torch.tensor(lengths).cumsum(0).tolist()],dtype=torch.int32,device="cuda")
    S=sum(lengths); q,k,v=(torch.randn(1,h,S,64,device="cuda",dtype=torch.bfloat16,requires_grad=True) for h in (8,2,2))
    for w in (None,3,64):
        out,_=attend_varlen(torch.nn.Identity(),q,k,v,None,scaling=0.125,row_ends=ends,longest_row=max(lengths),sliding_window=w)
        outs=[]
        for a,b,c in zip(*(p.float().split(lengths,dim=2) for p in (q,k,v))):
            n=a.shape[2]; m=torch.ones(n,n,dtype=torch.bool,device="cuda").tril()
            if w: m=m.triu(1-w)
            outs.append(F.scaled_dot_product_attention(a,b,c,attn_mask=m,scale=0.125,enable_gqa=True))
        e=torch.cat(outs,2).transpose(1,2); g=torch.randn_like(out)
        ga=torch.autograd.grad((out*g).sum(),(q,k,v),retain_graph=True); gb=torch.autograd.grad((e*g.float()).sum(),(q,k,v),retain_graph=True)
        print("WINDOW",lengths,w,float((out-e).abs().max()),[float((x.float()-y.float()).norm()/y.float().norm()) for x,y in zip(ga,gb)])
P
grep WINDOW $OUT/window.log || tail -5 $OUT/window.log
C="trainer.compile=true"
b old 0 170 old06 --work train-0.6b $C & b new 1 170 new06 --work train-0.6b $C & b old 2 200 old4 --work train-4b $C trainer.recompute=full & b new 3 200 new4 --work train-4b $C trainer.recompute=full & wait
say phase2
b new 0,1,2,3 110 moe4f --work train-moe --layers 4 --steps 5 trainer.dp=4 trainer.ep=4
b new 0,1,2,3 130 moe10f --work train-moe --layers 10 --steps 5 trainer.dp=4 trainer.ep=4
b new 0,1,2,3 110 moe4m --work train-moe --layers 4 --steps 5 --backend megatron trainer.dp=4 trainer.ep=4
say end
