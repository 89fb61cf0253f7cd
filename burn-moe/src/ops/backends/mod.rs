#[cfg(feature = "autodiff")]
mod autodiff;
#[cfg(feature = "cubecl")]
mod cubecl;
#[cfg(feature = "flex")]
mod flex;
#[cfg(feature = "link")]
mod link;
