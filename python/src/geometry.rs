//! Python classes for layouts and namespaces, and the derivation of keys.

use std::hash::{Hash, Hasher};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use reprise_client::LearnedSalt;
use reprise_policy::key::KeyPart;
use reprise_policy::{BlockKey, Dtype, LayoutSpec, NamespaceDigest, NamespaceSpec, Parts, TenantName};

/// Names of element types in Python.
const DTYPES: [(&str, Dtype); 5] = [
    ("bf16", Dtype::Bf16),
    ("fp16", Dtype::Fp16),
    ("fp32", Dtype::Fp32),
    ("fp8", Dtype::Fp8),
    ("int8", Dtype::Int8),
];

/// Geometry of one model's KV cache on one rank.
///
/// An object is one part of one layer of one block: ``tokens_per_block * kv_heads * head_dim`` elements of
/// ``dtype``. A block has ``layers * parts`` objects, those of layer 0 first.
///
/// Args:
///     layers: number of layers on this rank. parts: objects per layer: 2 for separate keys and values, 1 for
///     a latent or for keys and values together. kv_heads: number of KV heads on this rank. head_dim:
///     elements per head and token. dtype: "bf16", "fp16", "fp32", "fp8" or "int8". tokens_per_block: number
///     of tokens of a block. tp_rank: this rank within its tensor-parallel group. tp_size: number of ranks of
///     the group.
///
/// Raises:
///     ValueError: a dimension is out of range; the message has the dimension and its limit.
#[pyclass(frozen, eq, hash, skip_from_py_object, module = "reprise")]
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Layout(pub(crate) reprise_policy::Layout);

#[pymethods]
impl Layout {
    #[new]
    #[pyo3(signature = (*, layers, kv_heads, head_dim, dtype, tokens_per_block, parts=2, tp_rank=0, tp_size=1))]
    #[expect(clippy::too_many_arguments, reason = "all are keyword arguments in Python")]
    fn new(
        layers: u16,
        kv_heads: u16,
        head_dim: u16,
        dtype: &str,
        tokens_per_block: u16,
        parts: u8,
        tp_rank: u16,
        tp_size: u16,
    ) -> PyResult<Layout> {
        let parts = Parts::from_wire(parts).ok_or_else(|| {
            PyValueError::new_err(format!("layout: invalid parts {parts}: expected 1 or 2"))
        })?;
        let dtype =
            DTYPES.iter().find(|(name, _)| *name == dtype).map(|(_, dtype)| *dtype).ok_or_else(|| {
                let names = DTYPES.map(|(name, _)| name).join(", ");
                PyValueError::new_err(format!("layout: invalid dtype {dtype:?}: expected one of {names}"))
            })?;
        let spec =
            LayoutSpec { layers, parts, kv_heads, head_dim, dtype, tokens_per_block, tp_rank, tp_size };
        spec.validate().map(Layout).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// Number of layers on this rank.
    #[getter]
    fn layers(&self) -> u16 {
        self.0.spec().layers
    }

    /// Number of objects per layer of a block.
    #[getter]
    fn parts(&self) -> u32 {
        self.0.parts()
    }

    /// Number of KV heads on this rank.
    #[getter]
    fn kv_heads(&self) -> u16 {
        self.0.spec().kv_heads
    }

    /// Number of elements per head and token.
    #[getter]
    fn head_dim(&self) -> u16 {
        self.0.spec().head_dim
    }

    /// Name of the element type.
    #[getter]
    fn dtype(&self) -> &'static str {
        let dtype = self.0.spec().dtype;
        DTYPES.iter().find(|(_, found)| *found == dtype).map_or("unknown", |(name, _)| name)
    }

    /// Number of tokens of a block.
    #[getter]
    fn tokens_per_block(&self) -> u16 {
        self.0.spec().tokens_per_block
    }

    /// This rank within its tensor-parallel group.
    #[getter]
    fn tp_rank(&self) -> u16 {
        self.0.spec().tp_rank
    }

    /// Number of ranks of the tensor-parallel group.
    #[getter]
    fn tp_size(&self) -> u16 {
        self.0.spec().tp_size
    }

    /// Size of an object in bytes.
    #[getter]
    fn object_bytes(&self) -> u64 {
        self.0.object_bytes()
    }

    /// Size of one layer of a block in bytes.
    #[getter]
    fn layer_bytes(&self) -> u64 {
        self.0.layer_bytes()
    }

    /// Size of a block in bytes.
    #[getter]
    fn block_bytes(&self) -> u64 {
        self.0.block_bytes()
    }

    fn __repr__(&self) -> String {
        let spec = self.0.spec();
        format!(
            "Layout(layers={}, parts={}, kv_heads={}, head_dim={}, dtype={:?}, tokens_per_block={}, tp_rank={}, tp_size={})",
            spec.layers,
            spec.parts as u32,
            spec.kv_heads,
            spec.head_dim,
            self.dtype(),
            spec.tokens_per_block,
            spec.tp_rank,
            spec.tp_size
        )
    }
}

/// Properties that two KV blocks must have in common to be interchangeable. Engines share blocks only if all
/// are equal.
///
/// Args:
///     model: name of the model.
///     revision: revision or digest of the weights.
///     layout: geometry of the blocks on one rank.
///     hash_algorithm: algorithm of the engine's prefix chain, for example "sha256_cbor".
///     hash_seed: seed of the prefix chain.
///     engine_format: name and KV format of the engine, for example "vllm:LBHNC".
///     tenant: tenant of the blocks, whose salt is part of all keys; None: the tenant "default", which has no salt.
#[pyclass(frozen, eq, hash, skip_from_py_object, module = "reprise")]
#[derive(Clone, Debug)]
pub(crate) struct Namespace {
    /// Geometry of the blocks on one rank.
    #[pyo3(get)]
    pub(crate) layout: Layout,
    /// Without the tenant's salt.
    pub(crate) digest: NamespaceDigest,
    pub(crate) tenant: TenantKeys,
}

/// Tenant of blocks, and its isolation salt: a secret that the agent hands to sessions of the tenant. Namespaces with
/// this object learn the salt from each ``Session`` or ``Client`` of one of them. Before the first session, keys are
/// random, and nothing is stored under them.
///
/// Args:
///     tenant: name of the tenant. "default" has no salt.
#[pyclass(frozen, from_py_object, module = "reprise")]
#[derive(Clone, Debug)]
pub(crate) struct TenantKeys(pub(crate) LearnedSalt);

#[pymethods]
impl TenantKeys {
    #[new]
    fn new(tenant: &str) -> PyResult<TenantKeys> {
        let name = tenant
            .parse()
            .map_err(|error| PyValueError::new_err(format!("invalid tenant {tenant:?}: {error}")))?;
        Ok(TenantKeys(LearnedSalt::unknown(name)?))
    }

    /// Name of the tenant.
    #[getter]
    fn tenant(&self) -> String {
        self.0.tenant().to_string()
    }
}

impl PartialEq for Namespace {
    fn eq(&self, other: &Namespace) -> bool {
        self.identity() == other.identity()
    }
}

impl Eq for Namespace {}

impl Hash for Namespace {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.identity().hash(state);
    }
}

impl Namespace {
    fn identity(&self) -> (&Layout, &NamespaceDigest, &TenantName) {
        (&self.layout, &self.digest, self.tenant.0.tenant())
    }
}

#[pymethods]
impl Namespace {
    #[new]
    #[pyo3(signature = (*, model, revision, layout, hash_algorithm, hash_seed, engine_format, tenant=None))]
    #[expect(clippy::too_many_arguments, reason = "all are keyword arguments in Python")]
    fn new(
        model: String,
        revision: String,
        layout: &Layout,
        hash_algorithm: String,
        hash_seed: String,
        engine_format: String,
        tenant: Option<TenantKeys>,
    ) -> PyResult<Namespace> {
        let layout = layout.clone();
        let spec =
            NamespaceSpec { model, revision, layout: layout.0, hash_algorithm, hash_seed, engine_format };
        let tenant = tenant.map_or_else(|| TenantKeys::new("default"), Ok)?;
        Ok(Namespace { layout, digest: spec.digest(), tenant })
    }

    /// SHA-256 over all properties except the tenant: 32 bytes.
    #[getter]
    fn digest<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.digest.0)
    }
}

/// Returns the packed keys of blocks: 16 bytes per hash.
///
/// Args:
///     namespace: namespace of the engine.
///     hashes: hashes of the blocks from the engine's prefix chain; opaque bytes.
///     group: KV cache group of the engine.
///     shard: rank that holds this slice of the blocks.
#[pyfunction]
#[pyo3(signature = (namespace, hashes, group=0, shard=0))]
pub(crate) fn block_keys<'py>(
    py: Python<'py>,
    namespace: &Namespace,
    hashes: &Bound<'py, PyAny>,
    group: u32,
    shard: u32,
) -> PyResult<Bound<'py, PyBytes>> {
    let hash = |hash: PyResult<Bound<'py, PyAny>>| {
        let hash = hash?;
        hash.cast_into::<PyBytes>().map_err(|error| {
            PyTypeError::new_err(format!("invalid hash {}: expected bytes", error.into_inner()))
        })
    };
    let hashes: Vec<Bound<'py, PyBytes>> = hashes.try_iter()?.map(hash).collect::<PyResult<_>>()?;
    let bytes = hashes.iter().map(|hash| hash.as_bytes());
    let keys = namespace.tenant.0.derive(&namespace.digest, bytes, KeyPart { group, shard });
    Ok(PyBytes::new(py, &BlockKey::pack(&keys)))
}
