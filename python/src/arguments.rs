//! Conversion of Python arguments: keys, block numbers, times.

use std::time::Duration;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes};
use reprise_client::{ChainPlace, PhysicalBlock, Priority, Scope};
use reprise_policy::BlockKey;

/// Keys, given as packed bytes (16 per key) or as a sequence of keys.
pub(crate) struct Keys(pub(crate) Vec<BlockKey>);

impl<'a, 'py> FromPyObject<'a, 'py> for Keys {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Keys> {
        let packed = if let Ok(bytes) = object.cast::<PyBytes>() {
            bytes.as_bytes().to_vec()
        } else if let Ok(bytes) = object.cast::<PyByteArray>() {
            bytes.to_vec()
        } else {
            return object.try_iter()?.map(|key| one_key(&key?)).collect::<PyResult<_>>().map(Keys);
        };
        let keys = BlockKey::unpack(&packed).ok_or_else(|| {
            PyValueError::new_err(format!(
                "invalid packed keys of {} bytes: expected a multiple of {}",
                packed.len(),
                BlockKey::SIZE
            ))
        })?;
        Ok(Keys(keys))
    }
}

/// One key of 16 bytes.
pub(crate) struct Key(pub(crate) BlockKey);

impl<'a, 'py> FromPyObject<'a, 'py> for Key {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Key> {
        one_key(&object).map(Key)
    }
}

fn one_key(key: &Bound<'_, PyAny>) -> PyResult<BlockKey> {
    let bytes = key
        .cast::<PyBytes>()
        .map_err(|_| PyTypeError::new_err(format!("invalid key {key}: expected {} bytes", BlockKey::SIZE)))?;
    let key = bytes.as_bytes().try_into().map_err(|_| {
        let length = bytes.as_bytes().len();
        PyValueError::new_err(format!("invalid key of {length} bytes: expected {}", BlockKey::SIZE))
    })?;
    Ok(BlockKey(key))
}

/// Place of the first block of a save in its chain.
pub(crate) fn chain_place(parent: Option<Key>, position: Option<u32>) -> ChainPlace {
    ChainPlace { parent: parent.map(|Key(key)| key), position }
}

/// Pairs each key with its block of memory.
pub(crate) fn placed(keys: Keys, blocks: Vec<usize>) -> PyResult<Vec<(BlockKey, PhysicalBlock)>> {
    let keys = keys.0;
    if keys.len() != blocks.len() {
        let (keys, blocks) = (keys.len(), blocks.len());
        return Err(PyValueError::new_err(format!(
            "{keys} keys but {blocks} blocks: pass one block for each key"
        )));
    }
    Ok(keys.into_iter().zip(blocks.into_iter().map(PhysicalBlock)).collect())
}

/// Converts seconds to a duration; negative and non-finite values are errors.
pub(crate) fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value)
        .map_err(|error| PyValueError::new_err(format!("invalid {name} of {value} seconds: {error}")))
}

/// Converts `local` to the scope of a match or load.
pub(crate) fn scope(local: bool) -> Scope {
    if local { Scope::Local } else { Scope::Cluster }
}

/// Converts the name of a priority.
pub(crate) fn priority(name: &str) -> PyResult<Priority> {
    match name {
        "low" => Ok(Priority::Low),
        "normal" => Ok(Priority::Normal),
        "high" => Ok(Priority::High),
        other => Err(PyValueError::new_err(format!(
            "invalid priority {other:?}: expected 'low', 'normal' or 'high'"
        ))),
    }
}
