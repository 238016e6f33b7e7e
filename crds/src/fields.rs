//! Types that several kinds share: texts with a pattern, amounts with their unit, choices, selections, workloads.
//!
//! Every one of them writes its own bounds into the schema, so that a field cannot forget them: the API server weighs CEL
//! rules by the longest text and list that a schema lets through. Values are checked by the API server; code that reads an
//! object parses amounts again ([`Quantity::bytes`], [`Span::duration`]) and gets a `Result`.
//!
//! Deliberately absent: Kubernetes' own `Quantity`, whose schema carries 4 KiB of description for each field, and any check
//! that needs more than the object itself; those are the operator's, and end in a condition.

mod amounts;
mod choices;
mod selection;
mod texts;
mod workloads;

pub use amounts::{AmountError, Percent, Permille, Quantity, Span};
pub use choices::{DeletionPolicy, Engine, FallbackEngine, ForeignSignatures, NodeMode};
pub use selection::{
    ClusterRef, ConfigMapRef, KeyRef, LabelSelector, LabelTerm, LabelTermOperator, Labels, ObjectRef,
    SecretRef, Toleration, TolerationEffect, TolerationOperator,
};
pub use texts::{
    ConfirmationText, CpuAmount, DeviceGlob, DevicePath, Digest, Endpoint, GpuUuid, HostPath, ImageDigest,
    ImageRepository, ImageTag, KeyName, KeyPrefix, LabelKey, LabelValue, LogFilter, Name, NodeName,
    OciReference, PciAddress, Serial, ShortName, SocketMode, Text, Topic, Uid, Version,
};
pub use workloads::{Amounts, Image, LogFormat, LogSettings, PullPolicy, Resources};

pub(crate) use choices::choice;

use serde::de::DeserializeOwned;

/// A value of which every field has a default: what the API server makes of `{}`.
pub(crate) fn of_nothing<T: DeserializeOwned>() -> T {
    serde_json::from_value(serde_json::Value::Object(serde_json::Map::new()))
        .expect("every field of the type has a default")
}
